"""What makes a start cheap: container images read lazily, installed dependencies restored, stages measured."""
