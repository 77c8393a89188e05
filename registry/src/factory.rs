//! Device factories: who finds devices and opens them.

use crate::uri::DeviceUri;
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::device::Device;
use npuhal_core::error::DeviceError;
use thiserror::Error;

/// A device is there but cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{reason}{}{remedy}", if remedy.is_empty() { "" } else { "; " })]
pub struct Unavailable {
    /// What was wanted and what was found.
    pub reason: String,
    /// The command or setting that mends it; may be empty.
    pub remedy: String,
}

/// Finds, checks and opens the devices of one kind.
pub trait DeviceFactory: Send + Sync {
    /// Name, unique among the factories of one origin, e.g. `amdxdna`.
    fn name(&self) -> &str;

    /// Kinds of device it looks for.
    fn generations(&self) -> &[Generation];

    /// Whether it looks at the machine. A factory of virtual devices does not: that it found no hardware says nothing.
    fn looks_for_hardware(&self) -> bool {
        true
    }

    /// The devices that are there. Cheap: no device is opened, nothing is sent to one.
    fn enumerate(&self) -> Vec<DeviceCard>;

    /// What [`DeviceFactory::enumerate`] looked at where it found nothing, e.g. `no /dev/accel/accel* node`; empty where
    /// there is always a device.
    fn absence(&self) -> String {
        String::new()
    }

    /// The card of the device at `uri`, if it is this factory's. By default a card of [`DeviceFactory::enumerate`] with the
    /// address as id; a factory with a scheme of its own overrides it.
    fn resolve(&self, uri: &DeviceUri) -> Option<DeviceCard> {
        let id = uri.id();
        self.enumerate().into_iter().find(|card| card.id == id)
    }

    /// Whether the device can be used: permissions, driver version, firmware, limits.
    ///
    /// # Errors
    /// The reason, and what mends it.
    fn check(&self, card: &DeviceCard) -> Result<(), Unavailable>;

    /// Opens the device at `uri`.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`], [`DeviceError::Unsupported`] for parameters it does not know, [`DeviceError::Driver`].
    fn open(&self, uri: &DeviceUri) -> Result<Box<dyn Device>, DeviceError>;
}
