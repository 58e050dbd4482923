"""Reading: units are fetched and verified, with read-ahead, and a budget for speculation."""
