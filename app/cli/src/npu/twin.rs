//! The virtual NPU as a device: used only where the user names it.

use npuhal_amdxdna::silicon::Silicon;
use npuhal_amdxdna::{NpuDevice, NpuIdentity};
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::device::Device;
use npuhal_core::error::DeviceError;
use npuhal_registry::{DeviceFactory, DeviceUri, Unavailable};
use npuhal_virtual::{SpecError, VirtualDevice, VirtualSpec};
use std::sync::Arc;

/// Parts that have a twin.
const PARTS: [Silicon; 3] = [Silicon::Npu1, Silicon::Npu4, Silicon::Npu5];

/// Makes virtual NPUs: `virtual:npu1`, `virtual:npu4`, `virtual:npu5`, with the options of [`VirtualSpec`] as parameters.
pub(crate) struct VirtualFactory;

impl DeviceFactory for VirtualFactory {
    fn name(&self) -> &str {
        "virtual"
    }

    fn generations(&self) -> &[Generation] {
        &[Generation::Xdna1, Generation::Xdna2]
    }

    fn looks_for_hardware(&self) -> bool {
        false
    }

    fn enumerate(&self) -> Vec<DeviceCard> {
        PARTS.into_iter().map(card).collect()
    }

    fn check(&self, _: &DeviceCard) -> Result<(), Unavailable> {
        Ok(())
    }

    fn open(&self, uri: &DeviceUri) -> Result<Box<dyn Device>, DeviceError> {
        let (hardware, identity) = virtual_device(uri)?;
        Ok(Box::new(NpuDevice::open(hardware.connect(), &identity)?))
    }
}

/// The device that `uri` describes, and what a client calls it: the id of its card. Each is a device of its own.
pub(crate) fn virtual_device(uri: &DeviceUri) -> Result<(Arc<VirtualDevice>, NpuIdentity), DeviceError> {
    let spec: VirtualSpec = uri.to_string().parse().map_err(|error: SpecError| DeviceError::Unsupported {
        device: uri.id(),
        feature: format!("what was asked of it ({error})"),
        remedy: "e.g. virtual:npu5?profile=mainline-old&fault=timeout@3".to_owned(),
    })?;
    let hardware = VirtualDevice::new(&spec);
    let identity = NpuIdentity { id: card(spec.silicon).id, ..hardware.identity() };
    Ok((hardware, identity))
}

fn card(silicon: Silicon) -> DeviceCard {
    let facts = silicon.facts();
    DeviceCard {
        id: format!("virtual:{silicon}"),
        name: format!("virtual NPU ({})", facts.product),
        generation: silicon.generation(),
        is_virtual: true,
        columns: facts.columns - facts.unusable_columns,
        core_rows: facts.core_rows,
        memory_bytes: None,
        driver: None,
        context_limit: Some(facts.context_limit),
        features: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(text: &str) -> Result<Box<dyn Device>, DeviceError> {
        VirtualFactory.open(&text.parse().unwrap())
    }

    #[test]
    fn every_virtual_device_opens_with_its_profile() {
        for card in VirtualFactory.enumerate() {
            assert!(card.is_virtual);
            for (profile, version) in [("mainline-old", "0.1"), ("mainline-new", "0.16"), ("out-of-tree", "1.0")] {
                let device = open(&format!("{}?profile={profile}", card.id)).unwrap();
                let opened = device.card();
                assert_eq!((&opened.id, opened.columns, opened.is_virtual), (&card.id, card.columns, true));
                assert_eq!(opened.driver.as_ref().unwrap().version, version);
            }
        }
    }

    #[test]
    fn parameters_reach_the_device_and_wrong_ones_are_refused() {
        let error = open("virtual:npu1?fault=ENOMEM@heap:0").err().unwrap();
        assert!(error.to_string().contains("ENOMEM"), "{error}");
        let error = open("virtual:npu1?profile=newest").err().unwrap();
        assert!(error.to_string().contains("wanted mainline-old, mainline-new or out-of-tree"), "{error}");
        let error = open("virtual:npu4?fault=explode@1").err().unwrap();
        assert!(matches!(error, DeviceError::Unsupported { .. }), "{error}");
    }
}
