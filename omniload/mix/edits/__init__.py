"""Changes of a mix during training: the requests, the mix that results at each step, and the file of edits."""
