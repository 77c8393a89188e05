//! npuhal's OpenAI-compatible server.
//!
//! The HTTP process never owns a device: one worker process for each resident model does ([`worker`]). Between them go typed
//! messages ([`job`]). All text behaviour comes from the one generation loop of `npuhal-models`, which runs in the worker.

mod admission;
mod cores;
mod fleet;
mod http;
pub mod job;
mod metrics;
mod patience;
mod serve;
mod tls;
pub mod wire;
pub mod worker;

pub use fleet::{FleetOptions, ModelEntry};
pub use http::{ApiKey, DEFAULT_MAX_CHARS, ErrorBody, ErrorDetail, document};
pub use serve::{ServeError, ServerConfig, Started, Stop, Stopped, run, stop_signal};
pub use tls::TlsError;
pub use worker::link::{Hosting, InProcess};
