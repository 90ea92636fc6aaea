"""Models as files that run without vitral, each compared with the model that it was made from."""
