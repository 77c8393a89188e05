//! npuhal-registry
