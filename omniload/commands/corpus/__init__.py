"""What is made of documents outside of a run: a sample corpus, pages that show samples, tokens ahead of a run."""
