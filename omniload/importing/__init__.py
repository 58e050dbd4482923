"""Mix files of other tools, read into ours: faithful, or refused with what has no equivalent."""
