"""Builds the fallback fonts of pictures, with fontTools 4.68 and cffsubr 0.4.

python -m lab.make_fonts DEBIAN_ROOT DejaVuSans.ttf attention_jax/analysis/font_files
"""

import sys
import unicodedata
from pathlib import Path

import cffsubr
from fontTools import subset
from fontTools.ttLib import TTFont

NOTO = {  # a Noto font and the Unicode blocks kept of it
  'NotoSansDevanagari': '0900-097F A8E0-A8FF',
  'NotoSansBengali': '0980-09FF',
  'NotoSansGurmukhi': '0A00-0A7F',
  'NotoSansGujarati': '0A80-0AFF',
  'NotoSansOriya': '0B00-0B7F',
  'NotoSansTamil': '0B80-0BFF',
  'NotoSansTelugu': '0C00-0C7F',
  'NotoSansKannada': '0C80-0CFF',
  'NotoSansMalayalam': '0D00-0D7F',
  'NotoSansSinhala': '0D80-0DFF',
  'NotoSansThai': '0E00-0E7F',
  'NotoSerifTibetan': '0F00-0FFF',
  'NotoSansMyanmar': '1000-109F',
  'NotoSansEthiopic': '1200-139F',
  'NotoSansCherokee': '13A0-13FF AB70-ABBF',
  'NotoSansKhmer': '1780-17FF 19E0-19FF',
  'NotoSansThaana': '0780-07BF',
  'NotoSansOlChiki': '1C50-1C7F',
  'NotoSansChakma': '11100-1114F',
  'NotoSansAdlam': '1E900-1E95F',
  'NotoSansOsage': '104B0-104FF 0300-036F',
  'NotoSansArabic': '0600-06FF 0750-077F',
}
# DejaVu has these blocks, but a mark and its base must come from one font (Church Slavonic).
MARK_BLOCKS = '0300-036F 0400-052F'
SHAPING_FEATURES = [
  'ccmp',
  'locl',
  'nukt',
  'akhn',
  'rphf',
  'rkrf',
  'pref',
  'blwf',
  'half',
  'pstf',
  'vatu',
  'cjct',
  'abvf',
  'cfar',
  'init',
  'medi',
  'fina',
  'isol',
  'rlig',
  'pres',
  'abvs',
  'blws',
  'psts',
  'haln',
  'calt',
  'abvm',
  'blwm',
  'mark',
  'mkmk',
  'dist',
]
FEATURES_BY_FONT = {'NotoSerifTibetan': ['abvm', 'blwm', 'mark', 'mkmk']}  # its ready-made stacks alone are 450 KiB
COMMON_CODES = {0x20, 0x200C, 0x200D, 0x25CC}  # in every font: the bases that a lone mark is drawn on, and joiners
SUPPLEMENTARY_BLOCKS = '10330-1034F 10400-104FF 1E100-1E14F 1F000-1FAFF'  # scripts of CLDR beyond U+FFFF, and emoji


def main(root, dejavu, out):
  """Writes every font.

  Args:
    root: the folder into which the Debian packages were extracted.
    dejavu: the file of DejaVu Sans, whose characters the fallback fonts leave out.
    out: the folder of the fonts.
  """
  root = Path(root) / 'usr/share/fonts'
  out = Path(out)
  unifont = root / 'opentype/unifont/unifont.otf'
  upper = root / 'opentype/unifont/unifont_upper.otf'
  covered = set(TTFont(dejavu).getBestCmap())
  for name, blocks in NOTO.items():
    path = root / f'truetype/noto/{name}-Regular.ttf'
    covered |= save(path, codes(blocks), out / f'{name}.ttf', FEATURES_BY_FONT.get(name, SHAPING_FEATURES))
  covered |= save(root / 'truetype/droid/DroidSansFallbackFull.ttf', common_han(), out / 'DroidSansFallback.ttf')
  remaining = {c for c in range(0x10000) if unicodedata.category(chr(c))[0] in 'LMNPS'} - covered
  han = codes('4E00-9FFF')
  han_extension_a = codes('3400-4DBF')
  save(unifont, (remaining - han - han_extension_a) | codes(MARK_BLOCKS), out / 'Unifont.otf')
  save(unifont, remaining & han, out / 'UnifontHan.otf')
  save(unifont, remaining & han_extension_a, out / 'UnifontHanA.otf')
  save(upper, codes(SUPPLEMENTARY_BLOCKS) - covered, out / 'UnifontUpper.otf')


def codes(blocks):
  """Returns the code points of blocks such as '0900-097F A8E0-A8FF'."""
  pairs = [block.split('-') for block in blocks.split()]
  return {c for first, last in pairs for c in range(int(first, 16), int(last, 16) + 1)}


def common_han():
  """Kana, full-width forms and the first level of GB 2312 and of JIS X 0208: the characters in daily use."""
  pairs = [
    (codec, bytes([row, cell]))
    for codec, first, last in (('gb2312', 0xB0, 0xD7), ('euc_jp', 0xB0, 0xCF))
    for row in range(first, last + 1)
    for cell in range(0xA1, 0xFF)
  ]
  return codes('3000-30FF FF00-FFEF') | {ord(c) for codec, pair in pairs for c in pair.decode(codec, 'ignore')}


def save(path, wanted, out, features=()):
  """Writes the part of a font with the wanted code points.

  Args:
    path: the font.
    wanted: the code points.
    out: the new file.
    features: the OpenType features that are kept.

  Returns:
    The code points that the new font has.
  """
  options = subset.Options(hinting=False, layout_features=list(features), name_IDs=[0, 1, 2, 4, 5, 6, 13, 14])
  options.drop_tables += ['vhea', 'vmtx', 'VORG'] + ([] if features else ['GSUB', 'GPOS', 'GDEF'])
  font = TTFont(path)
  maker = subset.Subsetter(options)
  maker.populate(unicodes=wanted | COMMON_CODES)
  maker.subset(font)
  for record in font['name'].names:
    if record.nameID in (1, 4, 6):  # a family name of its own, so that it is never mistaken for the whole font
      record.string = out.stem
  if 'CFF ' in font:
    font['CFF '].cff.fontNames = [out.stem]
    cffsubr.subroutinize(font, keep_glyph_names=False)
  font.save(out)
  print(f'{out.name:28} {len(font.getBestCmap()):6} characters {out.stat().st_size:8} bytes')
  return set(font.getBestCmap())


if __name__ == '__main__':
  main(*sys.argv[1:])
