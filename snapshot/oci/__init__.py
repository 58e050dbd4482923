"""The registry side of images: references, manifests, and stores that hold them.

A store is a registry or a directory in the OCI layout; both answer alike
(``snapshot.oci.store.ImageStore``). Everything read from one is untrusted: sizes are
bounded before memory is taken, digests compared before a byte is used.
"""
