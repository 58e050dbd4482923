"""Reading: units fetched and verified, read-ahead, and a budget for speculation."""
