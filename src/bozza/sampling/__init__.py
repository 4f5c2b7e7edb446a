"""From logits to tokens: filters, and noise that depends on nothing but the request's seed and the position."""
