//! Routes, device factories and the choice between them.
//!
//! Design choices, first:
//!
//! * **Backends submit, the host ranks.** A linked crate submits its routes and factories ([`register_route`],
//!   [`register_factory`]); the origin, and with it the precedence, is derived by the host ([`Registry::collect`]) and does not
//!   depend on link order.
//! * **Looking is cheap, checking has reasons.** [`DeviceFactory::enumerate`] opens nothing; [`DeviceFactory::check`] says why
//!   a device cannot be used and what mends it.
//! * **Four ways to decline** ([`Decline`]): not mine, optional, unavailable (told), required (an error).
//! * **No silent fallback.** A pinned device that cannot serve is an error with its reason; what `auto` decided and why is
//!   data ([`Decision`]).
//! * **Add-ons are linked or loaded.** A linked one submits like a backend; a loaded one is a library opened at run time
//!   ([`addon`]), and everything it hands over is checked. The code for that is the only unsafe code here.

pub mod addon;
pub mod agreement;
pub mod cost;
pub mod extension;
pub mod factory;
pub mod options;
pub mod parity;
pub mod private;
pub mod registry;
pub mod route;
pub mod selection;
pub mod span;
pub mod split;
pub mod target;
pub mod uri;
pub mod witness;

pub use addon::{AddonError, AddonReport, AddonSources};
pub use cost::{CostSource, DeviceCost};
pub use extension::{Command, CommandEntry, Encoder, EncoderEntry, ExtensionError};
pub use factory::{DeviceFactory, Unavailable};
#[doc(hidden)]
pub use inventory;
pub use options::{NpuLayers, Numerics, OptionError, Options, Prefer};
pub use parity::Tolerance;
pub use registry::{FactoryEntry, Origin, Registry, RegistryError, RegistryHost, RouteEntry};
pub use route::{
    ANY_MODEL_TYPE, Decline, ExpectedSpeed, Fitness, Host, KernelOrigin, OpenRequest, Reason, Route, RouteError,
    SegmentRequest, Service, SpeedClass,
};
pub use selection::{
    Choice, Decision, DeviceCheck, DeviceReport, Request, SelectionError, SelectionProblem, select, survey_devices,
};
pub use span::{SegmentSpan, SpanError};
pub use split::{LayerSpan, Split, SplitPart};
pub use target::{Target, TargetError};
pub use uri::{DeviceAddress, DeviceChoice, DeviceUri, NpuModel, UriError};

#[cfg(test)]
mod tests;
