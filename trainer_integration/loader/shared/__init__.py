"""Workers that the ranks of one machine share: each batch that several ranks ask for is made once."""
