"""What Ray takes of a machine, measured: small planes, calls between bare actors, CPU time and memory of processes."""
