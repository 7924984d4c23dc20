"""What follows from numbers alone: nothing here holds a tensor or knows a model."""
