"""Parsers that formats share: columns of Arrow, lines of JSON, archives, indexes, compressed streams, cutting."""
