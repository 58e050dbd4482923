"""What a trained model is good for elsewhere: weights as Hugging Face has them, and text."""
