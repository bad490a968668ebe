"""How bytes get to files and back: staging memory, and engines that read and write in batches."""
