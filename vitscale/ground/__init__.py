"""The ground: errors, files, storage, text, tables, the native library. Knows nothing of training; all stand on it."""
