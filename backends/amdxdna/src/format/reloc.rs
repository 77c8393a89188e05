//! reloc
