"""Rematerialisation: which values the forward pass keeps, and which it makes again."""
