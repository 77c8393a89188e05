//! npuhal-tests
