//! npuhal
