"""The registry side of images: references, manifests, and stores that hold them.

A store is a registry or a directory in the OCI layout; both have the same interface
(``snapshot.oci.store.ImageStore``). Everything read from a store is untrusted: sizes are
limited before memory is taken, and digests are compared before a byte is used.
"""
