//! How long the modelled device takes.
//!
//! The model has five published figures of npu1: host memory is read at 6.8, 13.1, 22.4 and 32.5 GB/s by 1, 2, 4 and 8
//! streams at the same time, and a dispatch that does nearly nothing takes 0.14 ms (measured on hardware by the public
//! repository `c8dhjp4tyv-bit/hawkpoint-npu-llm`). Between them it is linear. For npu4 and npu5 no such figures are
//! published: the same table is used, and says nothing about these parts. Reading and writing overlap; the array is as
//! fast as its streams.

use std::time::Duration;

/// (streams, bytes a nanosecond).
const BANDWIDTH: [(f64, f64); 4] = [(1.0, 6.8), (2.0, 13.1), (4.0, 22.4), (8.0, 32.5)];
/// A dispatch that does nearly nothing.
pub(crate) const DISPATCH: Duration = Duration::from_micros(140);

/// What a run moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Bytes from memory to streams.
    pub(crate) read_bytes: u64,
    /// Shim channels that read.
    pub(crate) read_streams: u32,
    /// Bytes from streams to memory.
    pub(crate) written_bytes: u64,
    /// Shim channels that wrote.
    pub(crate) write_streams: u32,
}

impl Traffic {
    /// Modelled time of the transfers, without the dispatch.
    pub(crate) fn time(&self) -> Duration {
        transfer(self.read_bytes, self.read_streams).max(transfer(self.written_bytes, self.write_streams))
    }
}

fn transfer(bytes: u64, streams: u32) -> Duration {
    if bytes == 0 || streams == 0 {
        return Duration::ZERO;
    }
    Duration::from_nanos((bytes as f64 / bandwidth(streams)).round() as u64)
}

fn bandwidth(streams: u32) -> f64 {
    let n = f64::from(streams);
    for pair in BANDWIDTH.windows(2) {
        let ((n0, b0), (n1, b1)) = (pair[0], pair[1]);
        if n <= n1 {
            return b0 + (b1 - b0) * (n - n0) / (n1 - n0);
        }
    }
    BANDWIDTH[BANDWIDTH.len() - 1].1
}

#[cfg(test)]
mod tests {
    use super::{Traffic, bandwidth};
    use std::time::Duration;

    #[test]
    fn published_points_are_met() {
        for (streams, wanted) in [(1, 6.8), (2, 13.1), (4, 22.4), (8, 32.5), (16, 32.5)] {
            assert!((bandwidth(streams) - wanted).abs() < 1e-9, "{streams}");
        }
        assert!(bandwidth(3) > 13.1 && bandwidth(3) < 22.4);
        let traffic = Traffic { read_bytes: 6_800, read_streams: 1, written_bytes: 6_800, write_streams: 8 };
        assert_eq!(traffic.time(), Duration::from_nanos(1000));
        assert_eq!(Traffic::default().time(), Duration::ZERO);
    }
}
