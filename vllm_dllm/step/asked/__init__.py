"""What requests ask for: settings of steps, forms of answers, log-probabilities, predictions."""
