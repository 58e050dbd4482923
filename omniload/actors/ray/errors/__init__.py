"""What errors of Ray say of the actor that was asked."""
