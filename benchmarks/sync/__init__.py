"""Parts of the benchmarks of weight sync: transports, peers to compare with, trainers that die, engines under test."""
