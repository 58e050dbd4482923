"""How sources want their documents packed, where they say so themselves."""
