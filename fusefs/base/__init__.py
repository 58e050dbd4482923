"""What every room uses: serial executors, pools of threads, huge pages."""
