"""Who holds each role of a plane, who stands by, and who replaces whom."""
