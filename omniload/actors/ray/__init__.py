"""The Ray runtime: every role is a Ray actor. The only package that imports ray."""
