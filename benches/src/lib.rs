//! npuhal-benches
