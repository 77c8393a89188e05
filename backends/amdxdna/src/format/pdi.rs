//! Partition images.
//!
//! An image is opaque to a runtime. What is known here: it starts with four bus-width words, and it holds CDOs at
//! word boundaries. [`find_cdos`] locates those; [`minimal_image`] writes an image that holds CDOs and nothing else,
//! without the boot header and image tables that firmware reads. Devices that execute CDOs themselves accept it.

use super::bytes::pad_to;
use super::cdo::{Cdo, CdoError, CdoView};

/// Bus-width words that start an image.
pub const BUS_WIDTH_WORDS: [u32; 4] = [0x0000_00DD, 0x1122_3344, 0x5566_7788, 0x99AA_BBCC];
/// Alignment of CDOs in a minimal image.
const CDO_ALIGN: usize = 16;

/// Whether an image starts with the bus-width words.
pub fn has_bus_width_words(image: &[u8]) -> bool {
    let expected = BUS_WIDTH_WORDS.iter().flat_map(|word| word.to_le_bytes());
    image.len() >= 16 && image.iter().copied().zip(expected).all(|(found, wanted)| found == wanted)
}

/// CDOs in the order of their places. A place that looks like a header and fails its checks is an error, after which
/// the search goes on behind it.
pub fn find_cdos(image: &[u8]) -> CdoSearch<'_> {
    CdoSearch { image, at: 0 }
}

/// Iterator over the CDOs of an image.
#[derive(Debug, Clone)]
pub struct CdoSearch<'a> {
    image: &'a [u8],
    at: usize,
}

impl<'a> Iterator for CdoSearch<'a> {
    type Item = Result<CdoView<'a>, CdoError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.at + 8 <= self.image.len() {
            let at = self.at;
            self.at += 4;
            if CdoView::starts_at(self.image, at) {
                let found = CdoView::new(self.image, at);
                if let Ok(cdo) = &found {
                    self.at = at + cdo.len_bytes();
                }
                return Some(found);
            }
        }
        None
    }
}

/// An image that holds these CDOs and nothing else.
pub fn minimal_image(cdos: &[Cdo]) -> Result<Vec<u8>, CdoError> {
    let mut out: Vec<u8> = BUS_WIDTH_WORDS.iter().flat_map(|word| word.to_le_bytes()).collect();
    for cdo in cdos {
        pad_to(&mut out, CDO_ALIGN);
        out.extend(cdo.to_bytes()?);
    }
    pad_to(&mut out, CDO_ALIGN);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::cdo::CommandKind;
    use proptest::prelude::*;

    fn cdo(value: u32) -> Cdo {
        Cdo::new([CommandKind::Write { address: 0x0023_2000, value, long_address: false }])
    }

    #[test]
    fn cdos_of_a_minimal_image_are_found() {
        let image = minimal_image(&[cdo(1), cdo(2)]).unwrap();
        assert!(has_bus_width_words(&image));
        assert!(!has_bus_width_words(&image[..15]) && !has_bus_width_words(&[0; 32]));
        let found: Vec<_> = find_cdos(&image).map(|found| found.unwrap()).collect();
        assert_eq!(found.iter().map(|view| view.at_bytes).collect::<Vec<_>>(), [16, 64]);
        assert_eq!([found[0].to_cdo().unwrap(), found[1].to_cdo().unwrap()], [cdo(1), cdo(2)]);
    }

    #[test]
    fn a_damaged_header_is_an_error_and_the_search_goes_on() {
        let mut image = minimal_image(&[cdo(1), cdo(2)]).unwrap();
        image[16 + 12] ^= 1;
        let found: Vec<_> = find_cdos(&image).collect();
        assert!(matches!(found[0], Err(CdoError::Header { at_bytes: 16, field: "checksum", .. })));
        assert_eq!(found[1].as_ref().unwrap().to_cdo().unwrap(), cdo(2));
        assert_eq!(found.len(), 2);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        #[test]
        fn mutated_images_are_handled(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let mut image = minimal_image(&[cdo(1), cdo(2)]).unwrap();
            for (at, value) in changes {
                let at = at.index(image.len());
                image[at] = value;
            }
            if let Some(cut) = cut {
                image.truncate(cut.index(image.len()));
            }
            for view in find_cdos(&image).flatten() {
                if let Ok(cdo) = view.to_cdo() {
                    let at = view.at_bytes;
                    prop_assert_eq!(cdo.to_bytes().unwrap(), image[at..at + view.len_bytes()].to_vec());
                }
            }
        }
    }
}
