"""The front room: everything that ``import omniload`` offers to users."""
