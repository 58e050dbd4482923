"""Who gets it: DGraph, ClientPlaceTree, cost, pack membership, balance, plan records. Pure; metadata only."""
