"""Between the kernel and the namespace: the only modules that know pyfuse3 and trio."""
