"""The Ray runtime: every role an actor of a Ray of our own. The only room that imports ray."""
