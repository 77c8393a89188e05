//! cdo
