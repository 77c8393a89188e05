//! xclbin
