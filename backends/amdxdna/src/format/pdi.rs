//! pdi
