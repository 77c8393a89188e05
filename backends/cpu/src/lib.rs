//! npuhal-cpu
