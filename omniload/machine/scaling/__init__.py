"""What the number of loaders, and of readers of a source, follows: what is measured, and what the mix will draw."""
