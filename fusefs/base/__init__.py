"""Modules that every room uses: serial executors, pools of threads, huge pages."""
