"""Where compressed shards can be entered in their middle: found once, kept, and compared with what is read."""
