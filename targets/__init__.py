"""What each machine offers, as plain data; imports no TVM."""
