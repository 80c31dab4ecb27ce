"""A tiny vision-language model, trained from scratch, that answers questions about drawn scenes."""
