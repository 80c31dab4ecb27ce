"""The trained model that ships, with pictures and questions for it: files, no code."""
