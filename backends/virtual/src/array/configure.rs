//! Execution of configuration images.

use super::{ImageId, Partition, Surroundings, Trouble};
use crate::diagnosis::{Diagnosis, DiagnosisKind};
use npuhal_amdxdna::format::cdo::CommandKind;
use npuhal_amdxdna::format::pdi::find_cdos;

impl Partition {
    /// Loads an image by executing the configuration commands in it.
    pub(crate) fn load_image(
        &mut self,
        id: ImageId,
        image: Vec<u8>,
        op: Option<u32>,
        surroundings: &mut Surroundings<'_>,
    ) -> Result<(), Trouble> {
        let at_op = |diagnosis: Diagnosis| Trouble::Fault(op.map_or(diagnosis.clone(), |op| diagnosis.at_op(op)));
        if !self.is_idle() {
            let detail = format!("an image is loaded while transfers are in flight; {}", self.situation());
            return Err(at_op(Diagnosis::new(DiagnosisKind::ConfigurationInFlight, detail)));
        }
        if let Some((_, bytes)) = self.resident.as_ref().filter(|(resident, _)| is_resident(resident, &id)) {
            if *bytes != image {
                let detail = format!("{id:?} is resident with other contents; the new image was not loaded");
                surroundings.log.push(Diagnosis::new(DiagnosisKind::StaleConfiguration, detail));
            }
            return Ok(());
        }
        self.clear_configuration();
        self.execute(&image, surroundings).map_err(at_op)?;
        surroundings.loads.executed += 1;
        self.resident = Some((id, image));
        Ok(())
    }

    /// Whether the image of a compute unit is resident.
    pub(crate) fn has_unit(&self, unit: u32) -> bool {
        self.resident.as_ref().is_some_and(|(id, _)| *id == ImageId::Unit(unit))
    }

    /// A full configuration starts from a clean array.
    fn clear_configuration(&mut self) {
        let carried = self.take_traffic();
        *self = Self { carried, ..Self::new(self.columns) };
    }

    fn execute(&mut self, image: &[u8], surroundings: &Surroundings<'_>) -> Result<(), Diagnosis> {
        let mut found = 0;
        for cdo in find_cdos(image) {
            let cdo = cdo.map_err(|error| bad(&error))?;
            found += 1;
            for command in cdo.commands() {
                let command = command.map_err(|error| bad(&error))?;
                if command.kind == CommandKind::End {
                    break;
                }
                self.command(&command.kind, surroundings)?;
            }
        }
        if found == 0 {
            let detail = format!("no configuration commands in an image of {} bytes", image.len());
            return Err(Diagnosis::new(DiagnosisKind::BadConfiguration, detail));
        }
        Ok(())
    }

    fn command(&mut self, command: &CommandKind<'_>, surroundings: &Surroundings<'_>) -> Result<(), Diagnosis> {
        let programs = surroundings.programs;
        match command {
            CommandKind::Write { address, value, .. } => self.store(word(*address)?, *value, 0, programs),
            CommandKind::MaskWrite { address, mask, value, .. } => {
                let register = word(*address)?;
                let old = self.load(register)?;
                self.store(register, old & !mask | value & mask, 0, programs)
            }
            CommandKind::DmaWrite { address, data } => {
                let first = word(*address)?;
                (0..).zip(data.iter()).try_for_each(|(i, value)| {
                    let register = first.checked_add(4 * i).ok_or_else(|| out_of_array(*address))?;
                    self.store(register, value, 0, programs)
                })
            }
            CommandKind::MaskPoll { address, mask, expected, .. } => {
                let found = self.load(word(*address)?)?;
                if found & mask == *expected {
                    return Ok(());
                }
                let detail = format!("poll of {address:#x}: {found:#x} & {mask:#x} is not {expected:#x}");
                Err(Diagnosis::new(DiagnosisKind::BadConfiguration, detail))
            }
            CommandKind::Delay { .. } | CommandKind::Nop { .. } | CommandKind::Marker { .. } => Ok(()),
            other => {
                let detail = format!("configuration command {other:?}");
                Err(Diagnosis::new(DiagnosisKind::Unsupported, detail.chars().take(120).collect::<String>()))
            }
        }
    }
}

/// Inferred, check on hardware: an image is not loaded again when one with its id is resident.
fn is_resident(resident: &ImageId, wanted: &ImageId) -> bool {
    resident == wanted
}

fn word(address: u64) -> Result<u32, Diagnosis> {
    u32::try_from(address).map_err(|_| out_of_array(address))
}

fn out_of_array(address: u64) -> Diagnosis {
    Diagnosis::new(DiagnosisKind::UnknownRegister, format!("configuration address {address:#x}"))
}

fn bad(error: &dyn std::fmt::Display) -> Diagnosis {
    Diagnosis::new(DiagnosisKind::BadConfiguration, error.to_string())
}
