"""Real data as TensorFlow Datasets builders that are written and read without TensorFlow."""
