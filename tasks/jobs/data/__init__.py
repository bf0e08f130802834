"""What training reads: samples of tokens in an order that a seed decides, from one corpus or a mixture."""
