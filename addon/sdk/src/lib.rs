//! What the author of an add-on writes against.
//!
//! An add-on is an implementation of [`Route`] (and, if it likes, of [`Command`] and [`Encoder`]) that is submitted with
//! [`register_route!`], [`register_command!`], [`register_encoder!`]. The same code works in two forms:
//!
//! * **linked**: a program of your own names the crate (`use my_addon as _;`) and calls `npuhal::main()`;
//! * **loaded**: the crate is a `cdylib` with [`export!`] in it, and npuhal opens the library with `--addon FILE`.
//!
//! In the loaded form the model is opened a second time, by path, and mapped, not copied; panics are caught at the border and
//! become errors; devices and segments of the host cannot be opened.
//!
//! ```
//! use npuhal_addon::prelude::*;
//!
//! struct Mine;
//!
//! impl Route for Mine {
//!     fn name(&self) -> &str {
//!         "mine"
//!     }
//!     fn model_types(&self) -> &[&str] {
//!         &["llama"]
//!     }
//!     fn fitness(&self, model: &ModelSource, devices: &[DeviceCard], _: &Options) -> Fitness {
//!         match find_device(devices, Generation::Xdna2) {
//!             Some(card) => Fitness::Serves(service(card, model, 2048)),
//!             None => unavailable("there is no XDNA2 device"),
//!         }
//!     }
//!     fn open(&self, _: OpenRequest<'_>) -> Result<Session, RouteError> {
//!         Err(declined(self.name(), "this example ends here"))
//!     }
//! }
//!
//! npuhal_addon::register_route!(Mine);
//! # fn main() {}
//! ```

pub mod export;

pub use npuhal_addon_abi as abi;
pub use npuhal_core as core;
pub use npuhal_models as models;
pub use npuhal_registry as registry;
pub use npuhal_registry::{
    Command, Encoder, ExtensionError, Route, register_command, register_encoder, register_route,
};

use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::stage::{Placement, Yields};
use npuhal_models::ModelSource;
use npuhal_registry::{Decline, Fitness, Reason, RouteError, Service, SpeedClass};

/// What most add-ons need.
pub mod prelude {
    pub use crate::{declined, find_device, service, unavailable};
    pub use npuhal_core::card::{DeviceCard, Generation};
    pub use npuhal_core::stage::{
        Control, Generator, GeneratorOutcome, GeneratorRequest, HiddenRows, Placement, Row, SegmentCapacity,
        SequenceId, Session, Stepper, TokenId, Want, Yields,
    };
    pub use npuhal_core::{DeviceError, RunError};
    pub use npuhal_models::{ModelSource, TensorRole};
    pub use npuhal_registry::{
        Command, Decline, Encoder, ExtensionError, Fitness, OpenRequest, Options, Reason, Route, RouteError, Service,
        SpeedClass,
    };
}

/// The first device of a kind among those a route is offered.
#[must_use]
pub fn find_device(devices: &[DeviceCard], generation: Generation) -> Option<&DeviceCard> {
    devices.iter().find(|card| card.generation == generation)
}

/// A service of the whole model on one device, with `window` positions; the class of speed follows from the device.
#[must_use]
pub fn service(card: &DeviceCard, model: &ModelSource, window: u32) -> Service {
    let layers = 0..model.config().layers;
    Service {
        device: card.id.clone(),
        window,
        placement: vec![Placement { layers, device: card.id.clone(), yields: Yields::Logits }],
        speed: if card.generation == Generation::Cpu { SpeedClass::Cpu } else { SpeedClass::Lane },
        expected: None,
        memory_bytes: None,
        kernels: Vec::new(),
        detail: String::new(),
    }
}

/// The answer of a route that would run the model but cannot now; the user is told.
#[must_use]
pub fn unavailable(reason: impl Into<String>) -> Fitness {
    Fitness::Declines(Decline::Unavailable(Reason::new(reason)))
}

/// The error of a route that does not open a model after all.
#[must_use]
pub fn declined(route: &str, reason: impl Into<String>) -> RouteError {
    RouteError::Declined { route: route.to_owned(), reason: Reason::new(reason) }
}

/// Exports the add-on's entry: makes the crate (a `cdylib`) a library that npuhal can load. Everything that was submitted in
/// it, with [`register_route!`] and its like, is handed over.
///
/// Panics are caught at the border, which needs unwinding: with `panic = "abort"` it does not compile.
#[macro_export]
macro_rules! export {
    () => {
        #[cfg(panic = "abort")]
        ::core::compile_error!(
            "a loaded add-on must be built with panic = \"unwind\": its panics are caught at the border to npuhal"
        );

        #[doc(hidden)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn npuhal_addon_entry(
            host: *const $crate::abi::HostTable,
        ) -> *const $crate::abi::AddonTable {
            // SAFETY: the caller is a host, which passes its table.
            unsafe { $crate::export::entry(host, ::core::env!("CARGO_PKG_NAME"), ::core::env!("CARGO_PKG_VERSION")) }
        }
    };
}
