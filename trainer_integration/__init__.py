"""The included trainer: a small mixture-of-experts model fed by omniload, and what ties it to torch.

The only package that imports torch.
"""
