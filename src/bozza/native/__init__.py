"""What is written in C++, compiled when a model is loaded with `compile`, and its faces in Python."""
